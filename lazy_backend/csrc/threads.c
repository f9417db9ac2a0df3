// How many threads OpenMP gives to the parallel regions that the calling thread begins. C, so that no compiler flag for OpenMP is
// needed: the library is the one that torch has loaded, if any.
void omp_set_num_threads(int count) __attribute__((weak));

void lazysched_use_threads(int count) {
  if (omp_set_num_threads) omp_set_num_threads(count);
}
