"""What certified prices are computed with: likelihood ratios, their sums and compositions."""
