"""Export of the network in the model repository: FP32 from published weights, then INT8."""
