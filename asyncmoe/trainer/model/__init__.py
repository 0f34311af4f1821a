"""The Megatron model of a rank: how it is built, spread over ranks, optimised, saved and replayed."""
