"""The words that the balancer and the agents share: names, errors, frames. No I/O in this package."""
