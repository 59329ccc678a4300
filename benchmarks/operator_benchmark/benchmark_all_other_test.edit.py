# @@ before: batchnorm_test,
    attn_test,
