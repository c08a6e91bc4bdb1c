"""What can be known before training: checks of a run, memory, speed, and the state of the hosts."""
