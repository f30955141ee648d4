"""Predictions and exports with the final models of a run.

`model` restores one site's model and is the same for all methods and kinds of data. `tables`,
`images`, `texts` and `parties` read files of new rows; `export` and `onnx` write the model itself.
"""
