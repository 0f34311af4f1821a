"""The RPC between controller, rollout workers, trainer ranks and engines: messages, keys, one server, one client. No pickle."""
