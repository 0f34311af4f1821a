"""What makes Megatron and SGLang run on a machine without CUDA."""
