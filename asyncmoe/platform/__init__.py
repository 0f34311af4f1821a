"""Patches and checks that let Megatron and SGLang run on each platform, with or without CUDA."""
