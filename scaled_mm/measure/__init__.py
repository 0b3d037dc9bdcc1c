"""How times are taken and written down: what benchmarks, the autotuner and `scaled-mm verify` share.

Rooms: `timing` (the only place that times) with `sampling`, `rotation`, `runner`, `cuda_runner`, `regime`, `host` and `device`; `shapes` (which
products), `peer` (an implementation) and `run` (the loop over a grid); `roofline` (what the hardware allows), `environment` and `record`
(what a run's file holds), `stats`, `document` (a report as Markdown and HTML) and `plots`.

Nothing here is imported by `import scaled_mm`.
"""
