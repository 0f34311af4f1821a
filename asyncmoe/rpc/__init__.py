"""How the controller and the trainer ranks talk: messages, keys, one server, one client. No pickle."""
