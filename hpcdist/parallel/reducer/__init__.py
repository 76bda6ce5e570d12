"""The reducer: averages gradients, bucket by bucket, while backward still runs."""
