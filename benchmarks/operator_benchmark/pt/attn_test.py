import operator_benchmark as op_bench

import torch


"""
Microbenchmarks for attn: tanh(q @ k.T), and that @ v.
"""


# B is 0 for matrices without a batch.
attn_configs_short = op_bench.config_list(
    attr_names=["B", "M", "N", "D", "E"],
    attrs=[
        [0, 2, 2, 3, 4],
        [0, 256, 256, 64, 64],
        [8, 128, 128, 64, 64],
    ],
    cross_product_configs={
        "device": ["cpu", "cuda"],
        "dtype": [torch.float32],
    },
    tags=["short"],
)

attn_configs_long = op_bench.config_list(
    attr_names=["B", "M", "N", "D", "E"],
    attrs=[
        [0, 1, 4096, 64, 64],
        [0, 1024, 1024, 16, 16],
        [0, 1024, 1024, 64, 64],
        [0, 1024, 1024, 256, 256],
        [0, 2048, 512, 32, 128],
        [8, 512, 512, 64, 64],
    ],
    cross_product_configs={
        "device": ["cpu", "cuda"],
        "dtype": [torch.float32, torch.bfloat16],
    },
    tags=["long"],
)


class AttnBenchmark(op_bench.TorchBenchmarkBase):
    def init(self, B, M, N, D, E, device, dtype):
        batch = (B,) if B else ()

        def rand(*matrix):
            return torch.rand(
                batch + matrix,
                device=device,
                dtype=dtype,
                requires_grad=self.auto_set(),
            )

        self.inputs = {"q": rand(M, D), "k": rand(N, D), "v": rand(N, E)}
        self.set_module_name("attn")

    def forward(self, q, k, v):
        # The framework wants one tensor, which the backward starts from.
        return torch.attn(q, k, v)[0]


op_bench.generate_pt_test(attn_configs_short + attn_configs_long, AttnBenchmark)
op_bench.generate_pt_gradient_test(
    attn_configs_short + attn_configs_long, AttnBenchmark
)


if __name__ == "__main__":
    op_bench.benchmark_runner.main()
