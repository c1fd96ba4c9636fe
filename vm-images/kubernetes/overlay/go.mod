module loopfs.invalid/vm-images/kubernetes/overlay

go 1.26.0

// The code in native becomes part of Kubernetes, and is tested here with the versions that Kubernetes requires.
require (
	github.com/moby/sys/mountinfo v0.7.2
	golang.org/x/sys v0.40.0
)
