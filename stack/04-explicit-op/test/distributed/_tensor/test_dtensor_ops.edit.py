# @@ before: xfail("bernoulli"),
    xfail("attn"),  # no sharding strategy
