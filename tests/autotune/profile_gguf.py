"""Where the clocks of the kernels go (Clocks in wgmma_rounded.cuh): `SCALED_MM_JIT=wait python tests/autotune/profile_gguf.py`, on an H200."""

import os

import torch

import scaled_mm as sm

ROWS = os.environ.get("TRY_ROWS", "16_k16_x3 32_k16_x2 64_k16_x2 96_k16_x3 128_k16_x3 256_k16_x2").split()
handle = sm.Handle("cuda:0")
profile = torch.zeros(1024, 2, 8, dtype=torch.int32, device="cuda")
os.environ["GGUF_PROFILE"] = str(profile.data_ptr())
print("clocks per pair of blocks (64 k), means over warpgroups (shortest to longest):")
for N, K in ((28672, 8192), (4096, 14336), (4096, 4096)):
    packed = [sm.pack_block_weight(sm.quantize_block(torch.randn(N, K, device="cuda"), "q4_0", rule="ggml"), "q4_0") for _ in range(6)]
    for name in ROWS:
        M = int(name.split("_")[0])
        x, out = torch.randn(M, K, device="cuda").half(), torch.empty(M, N, dtype=torch.float16, device="cuda").t()
        for split in (0, 4) if N == 4096 and M <= 64 else (0,):
            os.environ["GGUF_SPLIT"] = str(split)
            with sm.create_block_descriptor(handle, out=out, weight=packed[0], activation=x, mode="w16a16", kernel=f"gguf_wgmma_128x{name}") as plan:
                workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
                for weight in packed:
                    profile.zero_()
                    plan.calculate(out, weight, x, workspace=workspace)
            rows = profile.view(-1, 8)[profile.view(-1, 8)[:, 6] > 0].double().cpu()
            per_pair = rows[:, :6] / rows[:, 6:7]
            mean, rest = per_pair.mean(0).tolist(), (per_pair[:, 0] - per_pair[:, 1:].sum(1)).mean()
            what = " + ".join(f"{name} {value:.0f}" for name, value in zip(("tiles", "values", "turn", "issue", "wait", "rest"), (*mean[1:], rest)))
            ends = f"({per_pair[:, 0].min():.0f} to {per_pair[:, 0].max():.0f})"
            print(f"{N}x{K}, {M} tokens, split {split}: {rows[:, 6].mean():.0f} pairs, {mean[0]:.0f} {ends} = {what}", flush=True)
