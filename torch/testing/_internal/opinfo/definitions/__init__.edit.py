# @@ before: _masked,
    attn,

# @@ before: *_masked.op_db,
    *attn.op_db,
