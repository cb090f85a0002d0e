"""What certified profiles are computed with: likelihood ratios, their sums and compositions."""
