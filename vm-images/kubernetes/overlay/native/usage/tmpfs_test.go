package usage

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"loopfs.invalid/vm-images/kubernetes/overlay/internal/namespace"
)

func TestMain(m *testing.M) { namespace.Run(m) }

// walk measures a directory as the kubelet does without quotas: 512-byte blocks and the number of inodes.
func walk(t *testing.T, root string) Usage {
	t.Helper()
	var usage Usage
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var stat unix.Stat_t
		if err := unix.Lstat(path, &stat); err != nil {
			return err
		}
		usage.Bytes += stat.Blocks * 512
		usage.Inodes++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return usage
}

func write(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, size), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestTheUsageOfATmpfsIsThatOfAWalk(t *testing.T) {
	root := namespace.Tmpfs(t, "size=16m")
	check := func(state string) {
		t.Helper()
		usage, known := OfTmpfs(root)
		if expected := walk(t, root); !known || usage != expected {
			t.Errorf("%s: %v %v, and the walk finds %v", state, usage, known, expected)
		}
	}
	check("empty")
	for index := range 100 {
		write(t, filepath.Join(root, fmt.Sprintf("a/%d/b", index%7), fmt.Sprint(index)), 1+index*97)
	}
	if err := os.Symlink("a", filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(root, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(root, "a/0/b/0"), 1<<30); err != nil {
		t.Fatal(err)
	}
	check("full")
	if usage, _ := OfTmpfs(root); usage.Bytes < 100*4096 || usage.Inodes < 100 {
		t.Errorf("the files do not count: %v", usage)
	}
	if err := os.RemoveAll(filepath.Join(root, "a/3")); err != nil {
		t.Fatal(err)
	}
	check("after deletion")
}

func TestFilesOnATmpfsBelowBelongToThatTmpfs(t *testing.T) {
	root := namespace.Tmpfs(t, "size=16m")
	below := filepath.Join(root, "below")
	write(t, filepath.Join(below, "hidden"), 4096)
	if err := unix.Mount("tmpfs", below, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(below, "file"), 1<<20)
	usage, known := OfTmpfs(root)
	// The root, the directory and the hidden file.
	if expected := (Usage{Bytes: 4096, Inodes: 3}); !known || usage != expected {
		t.Errorf("%v %v", usage, known)
	}
	usage, known = OfTmpfs(below)
	if expected := (Usage{Bytes: 1 << 20, Inodes: 2}); !known || usage != expected {
		t.Errorf("%v %v", usage, known)
	}
}

func TestABindMountOfAWholeTmpfsHasItsUsage(t *testing.T) {
	root, target := namespace.Tmpfs(t, "size=16m"), filepath.Join(namespace.Tmpfs(t, ""), "target")
	write(t, filepath.Join(root, "file"), 8192)
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(root, target, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	usage, known := OfTmpfs(target)
	if expected := (Usage{Bytes: 8192, Inodes: 2}); !known || usage != expected {
		t.Errorf("%v %v", usage, known)
	}
}

func TestPathsWhoseUsageTheFileSystemDoesNotTellAreLeftToAWalk(t *testing.T) {
	root := namespace.Tmpfs(t, "size=16m")
	write(t, filepath.Join(root, "part/file"), 4096)
	write(t, filepath.Join(root, "file"), 4096)
	bound := filepath.Join(root, "bound")
	write(t, bound, 0)
	if err := unix.Mount(filepath.Join(root, "file"), bound, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	part := filepath.Join(namespace.Tmpfs(t, ""), "part")
	if err := os.Mkdir(part, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(filepath.Join(root, "part"), part, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"a directory of a tmpfs":          filepath.Join(root, "part"),
		"a bind mount of a part":          part,
		"a bind mount of a file":          bound,
		"a symbolic link to a tmpfs":      link,
		"a tmpfs without limit of space":  namespace.Tmpfs(t, "size=0"),
		"a tmpfs without limit of inodes": namespace.Tmpfs(t, "nr_inodes=0"),
		"a file system without space":     "/proc",
		"another file system with space":  "/",
		"a missing path":                  filepath.Join(root, "missing"),
		"no path":                         "",
	} {
		if usage, known := OfTmpfs(path); known {
			t.Errorf("%s: %v", name, usage)
		}
	}
}
