"""The RPC between controller, trainer ranks and engines: messages, keys, one server, one client. No pickle."""
