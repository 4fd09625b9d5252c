"""What several tests share: servers, fakes and small helpers."""
