"""Where the parts are put together and started. The only package that imports both sides, and Ray."""
