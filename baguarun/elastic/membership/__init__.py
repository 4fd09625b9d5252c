"""Agent side: which nodes are in the job, agreed through etcd. Never imports torch."""
