"""Weight updates, as the controller drives them."""
