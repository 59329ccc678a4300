# @@ before: 'frexp', 'lu_unpack', 'histogram', 'histogramdd',
    'attn',

# @@ before: op(operators=['frexp'], input=(), names=('mantissa', 'exponent'), hasout=True),
            op(operators=['attn'], input=(a, a), names=('output', 'attn'), hasout=False),
