"""One decoder layer of whole models, next to the same layer from vLLM's operators and to torch in bfloat16.

Rooms: `cases` (what is timed), `inputs` (weights and activations), `ours`, `vllm`, `plain` (the layer by each implementation), `peers`, `suite`,
`record`, `goals`, `report`.
"""
