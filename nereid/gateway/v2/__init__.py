"""The v2 protocol (Open Inference Protocol) with checks: nothing reaches Triton that can end or block it."""
