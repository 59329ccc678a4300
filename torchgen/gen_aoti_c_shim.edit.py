# @@ before: "convolution_backward",
        "_attn_backward",
        "_attn_output_backward",
        "_attn_output_double_backward",
        "_attn_output_triple_backward",
# @@ before: def gen_static_dispatch_backend_call(
# A kernel of these may be registered after the build, from Python. Where a device
# has no kernel of its own, the C function therefore calls the dispatcher.
by_dispatcher = {
    "_attn_backward",
    "_attn_output_backward",
    "_attn_output_double_backward",
    "_attn_output_jvp",
    "_attn_output_triple_backward",
    "attn",
    "attn_output",
}


# @@ after: cpp_sig = gen_static_dispatch_backend_call_signature(
    if (
        f.root_name in by_dispatcher
        and backend_index is not None
        and backend_index.dispatch_key == DispatchKey.CompositeExplicitAutograd
    ):
        return f"at::{cpp_sig.name()}"
# @@ before: body = "\n".join(
    includes += "".join(
        f"\n#include <ATen/ops/{f.root_name}.h>"
        for f in native_functions
        if f.root_name in by_dispatcher
    )
