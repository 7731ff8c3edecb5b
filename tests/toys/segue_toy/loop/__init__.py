"""A toy that writes, draws what it wrote, sees what it drew, and writes on."""
