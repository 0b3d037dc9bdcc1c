"""Greedy text of a W8A8 model that is split over the processes of torchrun: the same text with any number of them.

python examples/generate_parallel.py PATH IDS                                       one process
torchrun --nproc-per-node 8 examples/generate_parallel.py PATH IDS                  eight GPUs of one host
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/generate_parallel.py PATH IDS     on both of two hosts

PATH: a folder that `scaled_mm.save_pretrained` or `scaled-mm quantize` has written, or another compressed-tensors checkpoint.
IDS: token ids, as 1,2,3.
Without GPUs the processes compute on the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist

import scaled_mm as sm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder with a W8A8 checkpoint")
    parser.add_argument("ids", help="token ids, as 1,2,3")
    parser.add_argument("--tokens", type=int, default=20, help="number of tokens to generate")
    args = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    group = None
    if "WORLD_SIZE" in os.environ:  # torchrun has set it
        dist.init_process_group()
        group = dist.group.WORLD
    model = sm.from_pretrained(args.path, device=device, tp=group)  # with a group, each process reads its part
    ids = torch.tensor([[int(one) for one in args.ids.split(",")]], device=device)
    out = model.generate(ids, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
    if group is None or dist.get_rank() == 0:
        print(",".join(str(one) for one in out[0].tolist()))
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
