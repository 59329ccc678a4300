# @@ before: ("polygamma.polygamma_n_0", f32): {
    # attn is rounded to half between the two products; the reference does the same.
    ("attn", f16): {"reference_in_float": False},
    ("attn_output", f16): {"reference_in_float": False},
