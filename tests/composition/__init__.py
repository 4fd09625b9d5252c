"""Every algorithm with every feature of a training program that it has to get along with."""
