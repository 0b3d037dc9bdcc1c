"""The autotuner: measures candidate kernels on the GPU at hand and writes the tile table that serves it.

Rooms: `candidates` (which rows are legal), `model` (a predicted time), `state` (the journal of what was measured),
`worker` and `measure` (the process that times, and its parent, which survives it), `choose` (from times to buckets, and the
cliff rule), `cells` (measured times out of any report), `write` (the table as YAML), `tune` (the whole run), `record`, `report`
and `plots` (what it leaves behind).

Nothing here is imported by `import scaled_mm`. docs/guide/tuning.md is the guide.
"""
