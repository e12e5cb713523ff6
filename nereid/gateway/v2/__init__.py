"""The v2 protocol (Open Inference Protocol), checked so that no request can crash or block Triton."""
