"""What the processes of one replica do together: process groups, and tensor parallelism after the models' own plans."""
