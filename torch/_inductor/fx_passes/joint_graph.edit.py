# @@ before: if not config.fallback_random:
    if config.attn_output_pass:
        from .attn import leave_out_attn

        observer = GraphTransformObserver(graph, "leave_out_attn")
        count += observer.apply_graph_pass(leave_out_attn) or 0

