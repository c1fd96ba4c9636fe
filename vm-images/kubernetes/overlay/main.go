// Overlay writes changed copies of sources of Kubernetes, and the file that `go build -overlay` takes. It contains no
// source of Kubernetes: it finds what to change by the syntax tree, and fails if the source is not as expected.
//
// Usage: overlay MODULE_DIRECTORY OUTPUT_DIRECTORY
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// changes are the sources to change, relative to the module.
//
// The kubelet binds a second loop device to each block device of a pod, to hold the first one open. It finds it again by
// reading the backing file of every loop device. Volumes of loopfs need neither: the driver refuses to detach a device
// whose node is published.
var changes = map[string][]removal{
	"pkg/volume/util/util.go": {
		{function: "MapBlockVolume", method: "AttachFileDevice"},
		{function: "UnmapBlockVolume", method: "DetachFileDevice"},
	},
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: overlay MODULE_DIRECTORY OUTPUT_DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "overlay: %v\n", err)
		os.Exit(1)
	}
}

func write(module, output string) error {
	replaced := map[string]string{}
	for file, removals := range changes {
		path := filepath.Join(module, file)
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		changed, err := rewrite(file, source, removals)
		if err != nil {
			return err
		}
		target := filepath.Join(output, file)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(target, changed, 0o644); err != nil {
			return err
		}
		replaced[path] = target
	}
	text, err := json.MarshalIndent(map[string]any{"Replace": replaced}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(output, "overlay.json"), text, 0o644)
}
