/* Sleeps a moment where a program asks to yield, for LD_PRELOAD: Open MPI's ranks look for messages without end, with
   such a call between two looks, and on a machine with fewer cores than ranks leave little of them to the rank that
   they wait for. */
#include <time.h>

int sched_yield(void) {
    struct timespec moment = {0, 100000};
    nanosleep(&moment, 0);
    return 0;
}
