# @@ before: # Enable indirect_indexing asserts for decompositions and
# On a CPU, attn becomes attn_output if nothing reads its second result, which
# then takes no memory.
attn_output_pass = True
# A backward pass would have to compute that result again. So if there is one, the
# change is made only where the result would take at least this many bytes.
attn_output_min_bytes = 64 << 20

