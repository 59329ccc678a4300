// @@ before: case aten::baddbmm:
      case aten::attn:
