"""Any other pipeline of diffusers, whole: the one place where a library's pipeline is called."""
