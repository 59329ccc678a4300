# @@ after: self.torch_fp16 = [
            ("attn", mat0_fp32 + mat1_fp32 + mat2_fp32),
# @@ after: self.torch_16 = [
            ("attn", mat0_fp32 + mat1_fp32 + mat2_fp32),
