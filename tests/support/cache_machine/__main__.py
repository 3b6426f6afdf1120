import sys

from cache_machine import main

main(int(sys.argv[1]), int(sys.argv[2]))
