"""From a leased batch to the micro-batches of a rank."""
