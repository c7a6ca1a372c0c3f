"""Records as objects in an S3 bucket; importing this needs the extra `s3`. See README.md."""

from kvstore.tiers.s3.tier import S3Tier

__all__ = ["S3Tier"]
