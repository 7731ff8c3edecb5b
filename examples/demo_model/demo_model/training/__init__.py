"""What learns: networks, losses, optimizers, and the order in which parts are trained."""
