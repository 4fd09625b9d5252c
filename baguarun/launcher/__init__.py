"""Agent side: job spec, submitters, agent, worker processes, logs, devices and binding."""
