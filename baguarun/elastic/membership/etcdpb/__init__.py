"""etcd's v3 messages, generated from `etcd.proto` and checked in; regenerate with `make proto`."""
