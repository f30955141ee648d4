"""How jobs run fast: stacking, CUDA graphs, autotuning, proofs and checks."""
