# @@ before: # Enable indirect_indexing asserts for decompositions and
# On a CPU, attn becomes attn_output if nothing reads its second result, which
# then takes no memory.
attn_output_pass = True
# If there is a backward, it would compute that result again. So then it must
# have so many bytes.
attn_output_min_bytes = 64 << 20

