// @@ before: case aten::baddbmm:
      case aten::attn:
      case aten::attn_output:
