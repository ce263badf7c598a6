"""Speed, always as ratios within one run: machines differ, and the same machine differs from hour to hour."""
