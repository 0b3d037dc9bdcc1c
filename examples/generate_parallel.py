"""Greedy text of a W8A8 model that is split over the processes of torchrun: the same text, however many they are.

python examples/generate_parallel.py PATH PROMPT                                    one process
torchrun --nproc-per-node 8 examples/generate_parallel.py PATH PROMPT               eight GPUs of one host
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/generate_parallel.py PATH PROMPT  on both of two hosts

PATH: a folder that `scaled_mm.save_pretrained` or `scaled-mm quantize` has written, or another compressed-tensors checkpoint.
PROMPT: a text, or token ids as 1,2,3; the output is of the same kind.
Without GPUs the processes compute on the CPU.
"""

import argparse
import gc
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps the group for good if it is first imported, as by transformers, while there is one
import transformers

import scaled_mm as sm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder with a W8A8 checkpoint")
    parser.add_argument("prompt", help="a text, or token ids as 1,2,3")
    parser.add_argument("--tokens", type=int, default=20, help="number of tokens to generate")
    parser.add_argument("--whole-attention", action="store_true", help="split feed-forward networks and experts only: the heads do not matter")
    args = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    group = None
    if "WORLD_SIZE" in os.environ:  # torchrun has set it
        dist.init_process_group()
        group = dist.group.WORLD
    out = generated(args, device, group)
    if group is None or dist.get_rank() == 0:
        print(out)
    if group is not None:
        dist.destroy_process_group()
        gc.collect()  # what is left of the model


def generated(args: argparse.Namespace, device: str, group: dist.ProcessGroup | None) -> str:
    """The text. A function, so that the model and its references to the group go when it returns: on a CPU the group's threads end with the last
    reference, and they must end before Python does, or torch may abort the process."""
    model = sm.from_pretrained(args.path, device=device, tp=group, tp_attention=not args.whole_attention)  # with a group, each process reads its part
    tokenizer = None
    if not re.fullmatch(r"\d+(,\d+)*", args.prompt):
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.path)
    ids = tokenizer(args.prompt)["input_ids"] if tokenizer else [int(one) for one in args.prompt.split(",")]
    ids = torch.tensor([ids], device=device)
    out = model.generate(ids, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0], skip_special_tokens=True) if tokenizer else ",".join(str(one) for one in out[0].tolist())


if __name__ == "__main__":
    main()
